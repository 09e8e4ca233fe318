// Folders that were dropped or chosen: the files in them, and whose pictures they are.

const PICTURE = /\.(avif|bmp|gif|heic|heif|jpe?g|png|tiff?|webp)$/i;   // HEIC has no type in most browsers

// What systems put among pictures; plsc/data/folder.py says whose they are.
const SYSTEM_FOLDERS = new Set(["@eadir", "#recycle", "#snapshot", "@__thumb", "@recycle", "@recently-snapshot", "$recycle.bin",
  "recycler", "system volume information", "__macosx", "lost+found"]);

export const isPicture = (file) => file.type.startsWith("image/") || PICTURE.test(file.name);

/** What was dropped, with folders looked through: [{path, file}]. The drop's data are gone after its own turn. */
export async function droppedFiles(transfer) {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry?.() ?? null).filter(Boolean);
  if (!entries.some((entry) => entry.isDirectory)) return [...transfer.files].map((file) => ({ path: file.name, file }));
  return (await Promise.all(entries.map((entry) => walk(entry, entry.name)))).flat();
}

/** What a folder's dialog gave, as `droppedFiles` has it. */
export const chosenFiles = (files) => [...files].map((file) => ({ path: file.webkitRelativePath || file.name, file }));

async function walk(entry, path) {
  if (entry.isFile) return [{ path, file: await new Promise((done, failed) => entry.file(done, failed)) }];
  const found = [];
  const reader = entry.createReader();
  for (;;) {   // a reader gives some hundred at a time, and none at the end
    const some = await new Promise((done, failed) => reader.readEntries(done, failed));
    if (some.length === 0) return found;
    for (const one of some) found.push(...await walk(one, `${path}/${one.name}`));
  }
}

/**
 * Whose the files are: {groups: [{name, files}], leftOut: [{name, why}]}. In a folder of folders each inner folder is
 * one group with all that lies below it; a folder of pictures is one group itself. Hidden files are passed over, and
 * files in systems' folders left out.
 */
export function groupByFolder(found) {
  const seen = found.map(({ path, file }) => ({ path, file, parts: path.split("/") }))
    .filter(({ parts }) => !parts.some((part) => part.startsWith(".")))
    .sort((one, other) => one.path.localeCompare(other.path, "en", { numeric: true }));
  const isOfSystem = ({ parts }) => parts.slice(0, -1).some((part) => SYSTEM_FOLDERS.has(part.toLowerCase()));
  const own = seen.filter((one) => !isOfSystem(one));
  const nested = new Set(own.filter(({ parts, file }) => parts.length > 2 && isPicture(file)).map(({ parts }) => parts[0]));
  const groups = new Map();
  const leftOut = seen.filter(isOfSystem).map(({ path }) => ({ name: path, why: "in a folder of the system's" }));
  for (const { path, file, parts } of own) {
    const depth = nested.has(parts[0]) ? 2 : 1;
    if (!isPicture(file)) leftOut.push({ name: path, why: "not a picture" });
    else if (parts.length <= depth) leftOut.push({ name: path, why: "beside the folders, in none of them" });
    else {
      const key = parts.slice(0, depth).join("/");
      if (!groups.has(key)) groups.set(key, { name: parts[depth - 1], files: [] });
      groups.get(key).files.push(file);
    }
  }
  return { groups: [...groups.values()], leftOut };
}
