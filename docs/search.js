// The search finds what is typed as it is. To lunr, "--env", "error:", "~/job" and "*" are operators, and a query with
// a wrong one finds nothing. The theme gives each query to a worker, as a message of type 2.
const QUERY = 2;
const post = Worker.prototype.postMessage;

Worker.prototype.postMessage = function (message, ...options) {
  if (message?.type === QUERY && typeof message.data === "string") {
    message = { ...message, data: message.data.replace(/(^|\s)-+|[:~^*+]/g, " ").trim() };
  }
  post.call(this, message, ...options);
};
