package clientconfig

import (
	"bytes"

	"go.yaml.in/yaml/v3"
)

// yamlSnippet returns a YAML file that has nothing but the entry. It builds nodes, because the encoder sorts
// the keys of a map, and the entry keeps the order of its documentation.
func yamlSnippet(container string, entry []field) ([]byte, error) {
	fields := &yaml.Node{Kind: yaml.MappingNode}
	for _, f := range entry {
		value := f.value
		if vars, ok := value.([]EnvVar); ok {
			m := map[string]string{}
			for _, v := range vars {
				m[v.Name] = v.Value
			}
			value = m
		}
		var key, node yaml.Node
		key.SetString(f.key)
		if err := node.Encode(value); err != nil {
			return nil, err
		}
		fields.Content = append(fields.Content, &key, &node)
	}
	var out bytes.Buffer
	enc := yaml.NewEncoder(&out)
	enc.SetIndent(2)
	err := enc.Encode(map[string]map[string]*yaml.Node{container: {EntryName: fields}})
	if err == nil {
		err = enc.Close()
	}
	return out.Bytes(), err
}
