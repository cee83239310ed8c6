"""Bad steps: losses and gradients that are not finite or that jump, found, localized by running again, and replayed.

Imports the rest of `train` but the trainer's own loop.
"""
