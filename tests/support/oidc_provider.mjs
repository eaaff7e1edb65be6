// A certified OpenID provider (npm: oidc-provider) whose people say who they are by their name alone.
// node oidc_provider.mjs '{"port": 4000, "redirect": "http://…", "people": {"ann": {"groups": ["a"]}}, …}'
import { createServer } from "node:http";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const require = createRequire(process.argv[3]);
const { default: Provider } = await import(pathToFileURL(require.resolve("oidc-provider")).href);
const { port, redirect, people, secret, jwks, alg = "RS256", ttl = 600, inIdToken = true } = JSON.parse(process.argv[2]);
const issuer = `http://127.0.0.1:${port}`;
const RESOURCE = "urn:sightline";

const provider = new Provider(issuer, {
  clients: [
    {
      client_id: "sightline",
      ...(secret ? { client_secret: secret } : { token_endpoint_auth_method: "none" }),
      redirect_uris: [redirect],
      id_token_signed_response_alg: alg,
    },
    ...Object.keys(people).map((name) => ({
      client_id: `robot-${name}`,
      client_secret: "robot-secret-0123456789",
      grant_types: ["client_credentials"],
      redirect_uris: [],
      response_types: [],
      id_token_signed_response_alg: alg,
    })),
  ],
  jwks,
  conformIdTokenClaims: !inIdToken,
  claims: { openid: ["sub"], profile: ["preferred_username"], groups: ["groups"] },
  scopes: ["openid", "profile", "groups"],
  pkce: { required: () => true },
  ttl: { IdToken: ttl, ClientCredentials: ttl, AccessToken: ttl, Interaction: 600, Session: 600, Grant: 600 },
  cookies: { keys: ["test"] },
  features: {
    devInteractions: { enabled: false },
    clientCredentials: { enabled: true },
    resourceIndicators: {
      enabled: true,
      getResourceServerInfo: (_context, resource) => ({ scope: "", audience: resource, accessTokenFormat: "jwt" }),
      defaultResource: (context) => (context.oidc.params?.grant_type === "client_credentials" ? RESOURCE : undefined),
      useGrantedResource: () => true,
    },
  },
  extraTokenClaims: (_context, token) => people[token.clientId?.replace("robot-", "")],
  findAccount: (_context, id) => ({
    accountId: id,
    claims: () => ({ sub: `id-of-${id}`, preferred_username: id, ...people[id] }),
  }),
  loadExistingGrant: async (context) => {
    const grant = new context.oidc.provider.Grant({
      clientId: context.oidc.client.clientId,
      accountId: context.oidc.session.accountId,
    });
    grant.addOIDCScope("openid profile groups");
    await grant.save();
    return grant;
  },
  interactions: { url: (_context, interaction) => `/people/${interaction.uid}` },
});

const serve = provider.callback();
createServer(async (request, response) => {
  if (!request.url.startsWith("/people/")) return serve(request, response);
  if (request.method === "GET") {
    response.setHeader("Content-Type", "text/html");
    return response.end('<form method="post"><input name="login" aria-label="Name"><button>Continue</button></form>');
  }
  let body = "";
  for await (const piece of request) body += piece;
  const login = new URLSearchParams(body).get("login");
  const result = people[login] ? { login: { accountId: login } } : { error: "access_denied" };
  await provider.interactionFinished(request, response, result, { mergeWithLastSubmission: false });
}).listen(port, "127.0.0.1", () => console.log("ready"));
