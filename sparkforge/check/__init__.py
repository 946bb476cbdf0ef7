"""Judgements: machine code of wheels, ceilings of decoding speed, quality of quantised layers."""
