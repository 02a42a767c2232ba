"""Whether a number format costs quality: paired runs, compared by normalised entropy."""
