// Let people search for a flag as it is written: the search reads a leading dash as "without this word".
document.addEventListener("input", ({target}) => {
  if (!target.matches?.(".md-search__input")) return
  const words = target.value.replace(/(^|\s)-{1,2}(?=[\w-])/g, "$1")
  if (words !== target.value) target.value = words
}, {capture: true})
