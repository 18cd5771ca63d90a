"""From a spec to a module: parse (spec), represent (ir), transform (passes), print (emit)."""
