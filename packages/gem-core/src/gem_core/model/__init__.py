"""Models: torch only, ops by name. ``gem``, and two to compare it with: ``hstu`` and ``dlrm``."""
