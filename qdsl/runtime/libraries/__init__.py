"""torch and Triton as the runtime uses them: what is not documented, launches, devices."""
