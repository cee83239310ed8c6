"""The comparison in bfloat16: the errors of both models against float64, with the routes of the float64 model."""
