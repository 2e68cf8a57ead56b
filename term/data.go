package term

import (
	"encoding/json"
	"io"

	"go.yaml.in/yaml/v3"
)

// WriteData prints v in a format of FormatFlag: json is indented, ndjson is one line.
func WriteData(w io.Writer, format string, v any) error {
	switch format {
	case "json":
		return WriteJSON(w, v)
	case "yaml":
		return WriteYAML(w, v)
	}
	return json.NewEncoder(w).Encode(v)
}

// WriteJSON prints v as indented JSON. Text is not escaped for HTML.
func WriteJSON(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	return enc.Encode(v)
}

// WriteYAML prints v as YAML, with the names and the order of its JSON, so that json tags
// apply to both formats. It encodes v as JSON, which is valid YAML, and clears the flow style.
func WriteYAML(w io.Writer, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	var doc yaml.Node
	if err := yaml.Unmarshal(b, &doc); err != nil {
		return err
	}
	setBlockStyle(&doc)
	enc := yaml.NewEncoder(w)
	enc.SetIndent(2)
	if err := enc.Encode(&doc); err != nil {
		return err
	}
	return enc.Close()
}

// setBlockStyle clears the style of a node and of all below it: the encoder then chooses
// block style, and quotes where YAML needs them.
func setBlockStyle(n *yaml.Node) {
	n.Style = 0
	for _, c := range n.Content {
		setBlockStyle(c)
	}
}
