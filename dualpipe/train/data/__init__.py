"""Training data: pack text into tokens, index the documents, and load batches as a pure function of the step."""
