"""Producer ids, and the transaction coordinator. Knows nothing of the other coordinators."""
