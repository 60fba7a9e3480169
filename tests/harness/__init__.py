"""What tests of several folders share: oracles, small models, programs of ranks, and things that note their use."""
