"""Where calibration tokens come from: texts, token files, data sets, the model itself; and what they leave behind."""
