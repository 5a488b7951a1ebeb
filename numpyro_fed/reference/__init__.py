"""What federated fits are held against: NUTS on the joint model, and the comparison."""
