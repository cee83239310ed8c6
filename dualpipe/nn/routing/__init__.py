"""Routing of tokens to experts: the router, its losses and load counts, and all routers of a model in a step."""
