"""What a broker tells of itself: the list of its metrics, the histogram they are counted in, and their text.

Pure values: nothing here knows a broker. Counters are plain integers in the rooms that count; who reads them when they
are asked for is `millrace.monitoring`.
"""
