"""The co-serving executor: two engines of different models on one device, serving first."""
