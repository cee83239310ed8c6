"""The dtype contract: rules for the dtypes of each tensor, resolved for a whole model into a `DTypePlan`."""
