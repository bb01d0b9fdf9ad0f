"""Pipelines: ordinary PySpark code in one file each, and what finds, checks and runs such a file.

`metrics`, `logs` and `streams` are pipelines: files to use as they are or to copy and change. `contract` says what
makes a file a pipeline, `runner` keeps one running, `progress` turns Spark's reports into figures. The command line
(`millrace pipeline`) stands on these; nothing here prints.
"""
