//lint:file-ignore SA1019 roots, sampling and logging are deprecated by MCP 2026-07-28 but part of the versions before it.

package mcp

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"agentctl/relay/kernel"
)

// client is the client's side of one request, as a plugin sees it (kernel.Session).
type client struct {
	x   *exchange
	req sdk.Request
	// ctx is the SDK's for this request: what is sent under it reaches the right stream,
	// whatever context a plugin uses. It ends with the request.
	ctx context.Context
	// direct is the message of a call that the SDK does not know (direct.go). Nothing can be
	// sent to the client during such a call.
	direct *envelope
}

var _ kernel.Session = (*client)(nil)

// session returns the SDK's session of this request. Plain modern requests share one.
func (c *client) session() *sdk.ServerSession {
	ss, _ := c.req.GetSession().(*sdk.ServerSession)
	return ss
}

// ProgressToken implements kernel.Session. It is nil when the client wants no progress.
func (c *client) ProgressToken() any {
	if p, ok := c.req.GetParams().(sdk.RequestParams); ok {
		return p.GetProgressToken()
	}
	return nil
}

// Capabilities implements kernel.Session. A legacy client sends them with initialize, a
// modern one with each request. They are nil when the client sent none.
func (c *client) Capabilities() json.RawMessage {
	switch {
	case c.x.call != nil:
		return c.x.call.capabilities
	case c.x.modern && c.direct != nil:
		return c.direct.capabilities
	}
	var caps any
	if c.x.modern {
		caps = c.req.GetParams().GetMeta()[sdk.MetaKeyClientCapabilities]
	} else if init := c.session().InitializeParams(); init != nil && init.Capabilities != nil {
		data, err := marshalCapabilities(init.Capabilities)
		if err != nil {
			return nil
		}
		return data
	}
	if caps == nil {
		return nil
	}
	data, err := json.Marshal(caps)
	if err != nil {
		return nil
	}
	return data
}

// hasCapability reports whether the client has announced a capability.
func (c *client) hasCapability(capability string) bool {
	var caps map[string]json.RawMessage
	return json.Unmarshal(c.Capabilities(), &caps) == nil && caps[capability] != nil
}

// sendProgress reports a frame if the client asked for progress.
func (c *client) sendProgress(done, total float64, message []byte) {
	if tok := c.ProgressToken(); tok != nil {
		_ = c.session().NotifyProgress(c.ctx, &sdk.ProgressNotificationParams{
			ProgressToken: tok, Progress: done, Total: total, Message: string(message),
		})
	}
}

// Notify implements kernel.Session. It ignores the context of the plugin, which may lack the
// values that the SDK needs to find the stream (see client.ctx).
//
// It sends progress (dropped when the client asked for none), log messages (dropped below the
// level that the client set) and the end of an elicitation by URL. Other methods are an error.
func (c *client) Notify(_ context.Context, method string, params json.RawMessage) (err error) {
	if c.direct != nil {
		return errNoMessages
	}
	switch method {
	case "notifications/progress":
		tok := c.ProgressToken()
		if tok == nil {
			return nil
		}
		var p sdk.ProgressNotificationParams
		if err = json.Unmarshal(params, &p); err == nil {
			p.ProgressToken = tok
			return c.session().NotifyProgress(c.ctx, &p)
		}
	case "notifications/message":
		var p sdk.LoggingMessageParams
		if err = json.Unmarshal(params, &p); err == nil {
			return c.log(method, &p)
		}
	case "notifications/elicitation/complete":
		var p sdk.ElicitationCompleteParams
		if err = json.Unmarshal(params, &p); err == nil {
			return c.session().NotifyElicitationComplete(c.ctx, &p)
		}
	default:
		err = errors.New("not a notification of a request")
	}
	return fmt.Errorf("notify %s: %w", method, err)
}

// log sends a log message. A session of the SDK has a level; on the session that plain
// modern requests share, each request has its own.
func (c *client) log(method string, p *sdk.LoggingMessageParams) error {
	switch {
	case c.x.call == nil:
		return c.session().Log(c.ctx, p)
	case !levelEnabled(c.req.GetParams().GetMeta()[metaLogLevelKey], p.Level):
		return nil
	}
	return send(c.ctx, c.x.tenant.h, c.session(), method, p)
}

// levels are those of RFC 5424, in ascending order.
var levels = []sdk.LoggingLevel{"debug", "info", "notice", "warning", "error", "critical", "alert", "emergency"}

// levelEnabled reports whether a client that asked for messages from one level on gets a
// message of another. A client that asked for none gets none.
func levelEnabled(asked any, level sdk.LoggingLevel) bool {
	want, ok := asked.(string)
	at := slices.Index(levels, sdk.LoggingLevel(want))
	return ok && at >= 0 && slices.Index(levels, level) >= at
}

// Request implements kernel.Session in the legacy era: elicitation/create,
// sampling/createMessage and roots/list, if the client has the capability. It waits for the
// client's answer until the plugin's context or the HTTP request ends.
func (c *client) Request(ctx context.Context, method string, params json.RawMessage) (json.RawMessage, error) {
	if c.x.modern {
		return nil, errNoServerRequests
	}
	if c.direct != nil {
		return nil, errNoMessages
	}
	need, ok := map[string]string{"elicitation/create": "elicitation", "sampling/createMessage": "sampling", "roots/list": "roots"}[method]
	if !ok {
		return nil, fmt.Errorf("ask %s: not a request to a client", method)
	}
	if !c.hasCapability(need) {
		return nil, fmt.Errorf("ask %s: %w: it has no %s capability", method, errInputUnavailable, need)
	}
	reqCtx, cancel := context.WithCancel(c.ctx)
	defer cancel()
	defer context.AfterFunc(ctx, cancel)()
	var res any
	var err error
	switch method {
	case "elicitation/create":
		var p sdk.ElicitParams
		if err = json.Unmarshal(params, &p); err == nil {
			res, err = c.session().Elicit(reqCtx, &p)
		}
	case "sampling/createMessage":
		var p sdk.CreateMessageWithToolsParams
		if err = json.Unmarshal(params, &p); err == nil {
			res, err = c.session().CreateMessageWithTools(reqCtx, &p)
		}
	default:
		res, err = c.session().ListRoots(reqCtx, nil)
	}
	if err != nil {
		return nil, fmt.Errorf("ask %s: %w", method, err)
	}
	return json.Marshal(res)
}

// maxInputRequests bounds what a tool may ask a legacy client for in one round.
const maxInputRequests = 16

// collectInput sends the input requests of a result to a legacy client, one after the other, and
// returns the request that repeats the call with the answers. A modern client does this itself.
func (c *client) collectInput(r *kernel.Request, res *kernel.Result) (*kernel.Request, error) {
	var wants map[string]struct {
		Method string          `json:"method"`
		Params json.RawMessage `json:"params"`
	}
	if err := json.Unmarshal(res.InputRequests, &wants); err != nil || len(wants) > maxInputRequests {
		return nil, errors.New("mcp: the tool's input requests are malformed")
	}
	got := make(map[string]json.RawMessage, len(wants))
	for name, w := range wants {
		if len(w.Params) == 0 {
			w.Params = json.RawMessage("{}")
		}
		data, err := c.Request(c.ctx, w.Method, w.Params)
		if err != nil {
			return nil, invalidParams("the client did not give the input that the tool needs")
		}
		got[name] = data
	}
	data, err := json.Marshal(got)
	if err != nil {
		return nil, err
	}
	return &kernel.Request{
		Caller: r.Caller, ConnID: r.ConnID, Tool: r.Tool, Arguments: r.Arguments, TraceID: r.TraceID, Traced: r.Traced,
		Session: r.Session, Meta: r.Meta, MarkUntrusted: r.MarkUntrusted, InputResponses: data, RequestState: res.RequestState,
	}, nil
}
