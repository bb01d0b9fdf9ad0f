"""Clusters of three brokers, measured from outside by ordinary clients: the same driver for both sides."""
