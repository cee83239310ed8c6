"""Bad steps and faulty ranks: detect non-finite numbers, spikes and wrong bits, find their origin, and react."""
