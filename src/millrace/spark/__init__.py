"""Spark on topics: the source and sink `format("millrace")`, sessions, sinks and pipelines."""
