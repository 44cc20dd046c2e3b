"""The synthetic language and the tiny target that is trained on it."""
