"""What a mesh will cost before it is rented: `dualpipe plan`."""
