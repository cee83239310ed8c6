"""`python -m dualpipe` is the `dualpipe` command."""

import os
import sys

if __name__ == "__main__":
    # `-m` puts the working directory in front of sys.path. In the repository's root, the folder `kernels/` would then
    # shadow the Hugging Face package of that name, which `transformers` imports.
    if not sys.flags.safe_path and sys.path and os.path.realpath(sys.path[0] or ".") == os.getcwd():
        del sys.path[0]
    from dualpipe.cli import main

    sys.exit(main())
