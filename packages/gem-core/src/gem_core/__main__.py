"""``python -m gem_core`` is ``gem``; torchrun wants a module: ``torchrun --nproc-per-node 2 -m gem_core train -c RECIPE``."""

from gem_core.cli.main import main

if __name__ == "__main__":
    main()
