"""Spark reading and writing topics: the pip-only source and sink beside Spark's JVM Kafka connector."""
