"use strict";
// Renders openapi.json and sends requests to the service it came from. Text is only ever set as text.

const make = (name, attributes = {}, ...children) => {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
};

const resolve = (api, schema) => {
  if (!schema || !schema.$ref) return schema || {};
  return api.components.schemas[schema.$ref.split("/").pop()] || {};
};

const typeOf = (schema) => {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (schema.anyOf) return schema.anyOf.map(typeOf).join(" | ");
  if (schema.type === "array") return `${typeOf(schema.items || {})}[]`;
  return [].concat(schema.type || "any").join(" | ");
};

const fields = (api, schema, seen = new Set()) => {
  const shown = resolve(api, schema);
  if (!shown.properties) return make("p", {}, make("code", {}, typeOf(schema)));
  const rows = Object.entries(shown.properties).map(([name, field]) => {
    const facts = [];
    if ((shown.required || []).includes(name)) facts.push("required");
    if (field.default !== undefined) facts.push(`default ${JSON.stringify(field.default)}`);
    if (field.description) facts.push(field.description);
    return make("tr", {}, make("td", {}, make("code", {}, name)), make("td", {}, make("code", {}, typeOf(field))),
      make("td", {}, facts.join("; ")));
  });
  const table = make("table", {}, ...rows);
  const nested = [];
  for (const field of Object.values(shown.properties)) {
    for (const inner of [field, field.items || {}, field.additionalProperties || {}, ...(field.anyOf || [])]) {
      if (inner && inner.$ref && !seen.has(inner.$ref)) {
        seen.add(inner.$ref);
        nested.push(make("h4", {}, inner.$ref.split("/").pop()), fields(api, inner, seen));
      }
    }
  }
  return make("div", {}, table, ...nested);
};

const tryOut = (path, method, operation) => {
  const inputs = new Map();
  const form = make("div");
  for (const parameter of operation.parameters || []) {
    const input = make("input", { placeholder: parameter.description || parameter.name });
    inputs.set(parameter, input);
    form.append(make("label", {}, `${parameter.name} `, input), " ");
  }
  const body = make("textarea", { rows: "4", "aria-label": "Body, JSON" });
  if (operation.requestBody) form.append(body);
  const answer = make("pre");
  const button = make("button", {}, "Send");
  button.addEventListener("click", async () => {
    let url = path;
    const query = new URLSearchParams();
    for (const [parameter, input] of inputs) {
      if (parameter.in === "path") url = url.replace(`{${parameter.name}}`, encodeURIComponent(input.value));
      else if (input.value) query.set(parameter.name, input.value);
    }
    const headers = {};
    const key = document.getElementById("key").value;
    if (key) headers.Authorization = `Bearer ${key}`;
    const options = { method, headers };
    if (operation.requestBody && body.value) {
      headers["Content-Type"] = "application/json";
      options.body = body.value;
    }
    try {
      const response = await fetch(query.size ? `${url}?${query}` : url, options);
      answer.textContent = `${response.status}\n${await response.text()}`;
    } catch (error) {
      answer.textContent = String(error);
    }
  });
  form.append(make("div", {}, button), answer);
  return form;
};

const show = (api, path, method, operation) => {
  const details = make("details", { id: operation.operationId },
    make("summary", {}, make("span", { class: `method ${method}` }, method), make("code", {}, path), ` ${operation.summary}`));
  if (operation.description) details.append(make("p", {}, operation.description));
  if (operation.parameters) {
    details.append(make("h3", {}, "Parameters"), make("table", {}, ...operation.parameters.map((parameter) =>
      make("tr", {}, make("td", {}, make("code", {}, parameter.name)), make("td", {}, parameter.in),
        make("td", {}, make("code", {}, typeOf(parameter.schema))), make("td", {}, parameter.description || "")))));
  }
  if (operation.requestBody) {
    details.append(make("h3", {}, "Body"), fields(api, operation.requestBody.content["application/json"].schema));
  }
  details.append(make("h3", {}, "Answers"));
  for (const [status, response] of Object.entries(operation.responses)) {
    const json = (response.content || {})["application/json"];
    const answer = make("details", {}, make("summary", {}, make("code", {}, status), ` ${response.description}`));
    if (json) answer.append(fields(api, json.schema));
    details.append(answer);
  }
  const streams = Object.values(operation.responses).some((response) => (response.content || {})["text/event-stream"]);
  if (!streams && !operation.responses["101"]) {
    details.append(make("h3", {}, "Try it"), tryOut(path, method, operation));
  }
  return details;
};

const render = async () => {
  const api = await (await fetch("openapi.json")).json();
  document.getElementById("about").textContent = `${api.info.version}: ${api.info.description}`;
  const byTag = new Map();
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      const tag = operation.tags[0];
      if (!byTag.has(tag)) byTag.set(tag, [make("h2", {}, tag)]);
      byTag.get(tag).push(show(api, path, method.toUpperCase(), operation));
    }
  }
  document.getElementById("operations").replaceChildren(...[...byTag.values()].flat());
};

render().catch((error) => { document.getElementById("about").textContent = `cannot show the API: ${error}`; });
