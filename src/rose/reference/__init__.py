"""The reference RL job: environment, learner, serving replay and the demo."""
