"""Training data: from files of text to batches that are a pure function of the step.

On disk: `sources` finds files and reads documents in the formats of `record_formats`; `tokenizer` and `chat` turn text
and conversations into tokens; `pack` writes them into a packed directory, and `show` prints it.
In a run: `token_stream` opens the directory as one sequence, with `document_index`; `splits` reserves validation text;
`sequences` and `mixture` choose the windows of every batch; `loader` reads them; `run_data` puts all of it together.
"""
