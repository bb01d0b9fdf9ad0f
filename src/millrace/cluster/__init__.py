"""The control plane: the cluster image, the decisions made from it, and the controller that alone changes it."""
