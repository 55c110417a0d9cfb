// Between a client and the server: connections that can be cut.

import net from "node:net";

/** A proxy to the server. `cut` breaks every connection as a lost network does; `opened` counts them. Like a load
 * balancer it lets a client wait while the server is being replaced. */
export async function breakable(target) {
  const { hostname, port } = new URL(target);
  const sockets = new Set();
  const proxy = { opened: 0 };
  const listener = net.createServer((near) => {
    proxy.opened += 1;
    sockets.add(near);
    near.on("error", () => undefined);
    near.on("close", () => sockets.delete(near));
    reach(near);
  });

  function reach(near) {
    const far = net.connect(Number(port), hostname);
    far.on("error", () => undefined);
    far.once("connect", () => {
      near.pipe(far).pipe(near);
      near.once("close", () => far.destroy());
      far.once("close", () => near.destroy());
    });
    far.once("close", () => {
      if (far.bytesRead === 0 && far.bytesWritten === 0 && !near.destroyed) setTimeout(reach, 50, near);
    });
  }

  await new Promise((resolve) => listener.listen(0, "127.0.0.1", resolve));
  proxy.url = `http://127.0.0.1:${listener.address().port}`;
  proxy.cut = () => sockets.forEach((socket) => socket.resetAndDestroy());
  proxy.close = () => {
    listener.close();
    sockets.forEach((socket) => socket.destroy());
  };
  return proxy;
}
