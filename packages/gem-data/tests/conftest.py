"""Settings for the tests of gem-data."""

import torch

torch.set_num_threads(1)
