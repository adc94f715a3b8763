// A client from the protos alone, in a language that sets no deadline by default.
// node node_client.js ADDRESS PROTOS IMAGE: puts the image into a new gallery, finds it, reads a file; prints JSON.
const fs = require("fs");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const [address, protos, image] = process.argv.slice(2);
const files = ["gallery", "search", "release"].map((name) => `nobackfill/v1/${name}.proto`);
const { v1 } = grpc.loadPackageDefinition(
  loader.loadSync(files, { includeDirs: [protos], keepCase: true, longs: Number, defaults: true }),
).nobackfill;
const insecure = grpc.credentials.createInsecure();
const galleries = new v1.GalleryService(address, insecure);
const searches = new v1.SearchService(address, insecure);
const releases = new v1.ReleaseService(address, insecure);

const unary = (client, method, request) =>
  new Promise((resolve, reject) =>
    client[method](request, (error, answer) => (error ? reject(error) : resolve(answer))),
  );

const streamed = (stream) =>
  new Promise((resolve, reject) => {
    const messages = [];
    stream.on("data", (message) => messages.push(message));
    stream.on("end", () => resolve(messages));
    stream.on("error", reject);
  });

async function main() {
  const bytes = fs.readFileSync(image);
  await unary(galleries, "CreateGallery", { name: "node" });
  const put = galleries.PutItems();
  const stored = streamed(put);
  put.write({ gallery: "node", items: [{ id: "a", image: bytes }] });
  put.end();
  const [{ stored: count }] = await stored;
  const found = await unary(searches, "Search", { gallery: "node", k: 1, query: { image: bytes } });
  const pieces = await streamed(releases.FetchFile({ path: "timestamp.json" }));
  const watch = releases.WatchReleases({});
  const first = await new Promise((resolve, reject) => watch.on("data", resolve).on("error", reject));
  watch.removeAllListeners("error").on("error", () => {});
  watch.cancel();
  console.log(
    JSON.stringify({
      stored: count,
      hits: found.hits.map((hit) => hit.id),
      file: Buffer.concat(pieces.map((piece) => piece.chunk)).length,
      releases: first.releases.map((release) => release.number),
    }),
  );
  for (const client of [galleries, searches, releases]) client.close();
}

main().catch((error) => {
  console.error(String(error));
  process.exit(1);
});
