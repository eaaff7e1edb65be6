"""What measures, draws, trains and plans; the library never imports it."""
