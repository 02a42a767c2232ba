"""What the fork server imports before it starts ranks."""

import gem_train_fakes
import torch.distributed.algorithms.join
import torch.nn.parallel

import gem_core.train.run

__all__ = ["gem_core", "gem_train_fakes", "torch"]
