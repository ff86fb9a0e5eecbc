// Pages opened from the disk may start no worker: the search runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      const inside = frame.contentWindow;
      inside.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        this.onmessage?.(event);
      };
      this.ready = new Promise((done, failed) => {
        const script = frame.contentDocument.createElement("script");
        Object.assign(script, { src: new URL(url, location.href), onload: done, onerror: failed });
        frame.contentDocument.documentElement.append(script);
      });
      this.send = (data) => inside.dispatchEvent(new inside.MessageEvent("message", { data }));
    }
    postMessage(data) {
      this.ready.then(() => this.send(data));
    }
    terminate() {}
  };
}
