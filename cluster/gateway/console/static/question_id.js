// A question's id, derived from its text.
/** "Is anyone climbing the fence?" → "anyone-climbing-the-fence" */
export function idOf(text) {
  const found = text.toLocaleLowerCase().normalize("NFKD").replace(/[^a-z0-9]+/g, "-").replace(/^(is|are|does|do|did|has|have|was|were|can|will)-/, "");
  return found.replace(/^-+|-+$/g, "").slice(0, 40).replace(/-+$/, "") || "question";
}
