"""Weights of a torch model that an engine serves, updated in place: where each checkpoint tensor lives, and a sink over it.

Nothing here is of one engine: the plan is traced from the model's own ``load_weights``. Needs torch.
"""
