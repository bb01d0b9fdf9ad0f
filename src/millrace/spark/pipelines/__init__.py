"""Pipelines: ordinary PySpark code in one file each, and what finds, checks and runs such a file.

`metrics`, `logs` and `streams` are pipelines: files to use as they are or to copy and change. `contract` says what
makes a file a pipeline, `runner` keeps one running, `progress` turns Spark's reports into figures, `status` is what a
run notes of itself, `control` starts and stops runs in the background. The command line (`millrace pipeline`) and the
console stand on these; nothing here prints.
"""
