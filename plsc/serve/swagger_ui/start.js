// Swagger UI over this service's own description. Nothing is asked of another host: no validator badge, no other specs.

SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#swagger-ui",
  presets: [SwaggerUIBundle.presets.apis],
  validatorUrl: null,
  defaultModelsExpandDepth: 0,
  displayRequestDuration: true,
  persistAuthorization: false,   // a token is forgotten with the tab
});
