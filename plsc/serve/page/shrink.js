// Large pictures are made smaller before they are sent: a phone's photograph is more than a service needs or takes.

const LONGEST = 2048;   // pixels of the longer side
const QUALITY = 0.92;   // of the JPEG
const GROUND = "#fff";  // shows through transparent pictures, as in the service

let queue = Promise.resolve();   // one after the other: a decoded photograph has some 200 MB

/** The file, smaller and turned upright where it is large and the browser can decode it; else the file as it is. */
export function shrunk(file) {
  const done = queue.then(() => shrink(file)).catch(() => file);
  queue = done;
  return done;
}

async function shrink(file) {
  const bitmap = await createImageBitmap(file, { imageOrientation: "from-image" });
  const scale = LONGEST / Math.max(bitmap.width, bitmap.height);
  try {
    if (scale >= 1) return file;
    const canvas = new OffscreenCanvas(Math.round(bitmap.width * scale) || 1, Math.round(bitmap.height * scale) || 1);
    const brush = canvas.getContext("2d");
    brush.fillStyle = GROUND;
    brush.fillRect(0, 0, canvas.width, canvas.height);
    brush.imageSmoothingQuality = "high";
    brush.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
    return await canvas.convertToBlob({ type: "image/jpeg", quality: QUALITY });
  } finally {
    bitmap.close();
  }
}
