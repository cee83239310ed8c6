"""Errors that every rank of a pipeline raises together."""


class PipelineError(RuntimeError):
    """A step failed on some rank while it ran; the message names the rank, the action and the cause."""


class UpstreamFailed(Exception):
    """Another rank could not send what this one needs; that rank reports the cause."""
