"""One way for ranks to agree, and one way to end a step on all of them when one fails."""
