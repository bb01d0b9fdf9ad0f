"""Producer ids now; transactions when they come. Knows nothing of the other coordinators."""
