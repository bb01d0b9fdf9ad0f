"""The metadata log: what a change is, the store that keeps changes in order, and the stores there are."""
