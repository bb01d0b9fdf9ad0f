"""Talking to a broker: other brokers, Spark executors and the command line where librdkafka cannot serve."""
