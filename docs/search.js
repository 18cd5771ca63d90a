/* The site's search reads a hyphen in front of a word as "without it".  Options are found by their names, as `--jobs` by jobs. */
addEventListener("keyup", ({ target }) => {
  if (target.matches(".md-search__input") && /(^|\s)-+\w/.test(target.value))
    target.value = target.value.replace(/(^|\s)-+(?=\w)/g, "$1");
}, true);
