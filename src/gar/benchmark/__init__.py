"""Update times, kernels and memory: of the shipped loop, and of other people's beside it (``gar bench``)."""
