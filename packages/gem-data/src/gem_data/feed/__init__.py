"""From columnar files to batches: units of reading, epoch order, decoded parts, batching, balance, cursor."""
