"""Whole brokers, measured from outside by ordinary clients: the same driver for millrace and for Apache Kafka."""
